"""What engines that generate code need: public calls, constants, shares of gradients."""
