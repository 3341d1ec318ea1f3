"""What both ends of NVIDIA FLARE share: names and hardened provisioning. Does not import nvflare."""
