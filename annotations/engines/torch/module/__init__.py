"""The parallel module that users hold: parameters, gradients, training calls."""
