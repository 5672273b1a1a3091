// Checks compose.yaml and kubernetes.yaml the way their own tools read them: compose by the loader of docker compose,
// every Kubernetes object by the API's own types, strictly, so that a misspelt field is an error.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

var kinds = map[string]func() any{
	"v1/ServiceAccount":                  func() any { return new(corev1.ServiceAccount) },
	"v1/Service":                         func() any { return new(corev1.Service) },
	"apps/v1/DaemonSet":                  func() any { return new(appsv1.DaemonSet) },
	"apps/v1/StatefulSet":                func() any { return new(appsv1.StatefulSet) },
	"networking.k8s.io/v1/NetworkPolicy": func() any { return new(networkingv1.NetworkPolicy) },
}

func compose(path string) error {
	options, err := cli.NewProjectOptions([]string{path}, cli.WithEnv([]string{"ENGINE_IMAGE=engine:1"}), cli.WithName("check"))
	if err != nil {
		return err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return err
	}
	fmt.Println(path, "services:", project.ServiceNames())
	return nil
}

func kubernetes(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var kind struct{ APIVersion, Kind string }
		if err := yaml.Unmarshal(document, &kind); err != nil {
			return err
		}
		if kind.Kind == "" {
			continue // the comment at the top
		}
		object, known := kinds[kind.APIVersion+"/"+kind.Kind]
		if !known {
			return fmt.Errorf("%s: no type for %s/%s", path, kind.APIVersion, kind.Kind)
		}
		if err := yaml.UnmarshalStrict(document, object()); err != nil {
			return fmt.Errorf("%s: %s: %w", path, kind.Kind, err)
		}
		fmt.Println(path, kind.Kind)
	}
}

func main() {
	if err := errors.Join(compose(os.Args[1]), kubernetes(os.Args[2])); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
