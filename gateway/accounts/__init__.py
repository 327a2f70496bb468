"""What requests cost and saved: pure sums."""
