"""For engines that generate code: public calls, constants and divided gradients."""
