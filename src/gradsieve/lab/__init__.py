"""Hosts and a network on one machine: network namespaces, shaped links, and the jobs that run in them."""
