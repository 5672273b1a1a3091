"""What happens to the counters downstream: collector, Prometheus, dashboards. Not part of the package."""
