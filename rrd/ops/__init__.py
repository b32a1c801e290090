"""The operations training is made of, each with its own backward pass where autograd's does more than is needed."""
