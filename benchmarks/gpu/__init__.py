"""All measurements that need a GPU."""
