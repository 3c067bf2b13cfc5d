"""What the machines are: clusters, devices and links."""
