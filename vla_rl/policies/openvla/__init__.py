"""OpenVLA and OpenVLA-OFT: the published checkpoints on stock libraries."""
