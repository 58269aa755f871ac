"""DP-SGD: each sample's gradient clipped, noise on their sum, and what that costs."""
