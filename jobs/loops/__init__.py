"""Trainings with a loop of their own, a page each: a GAN, distillation, REINFORCE and LBFGS."""
