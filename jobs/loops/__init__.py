"""Trainings with a loop of their own: GAN, distillation, REINFORCE, actor and critic, LBFGS, and words."""
