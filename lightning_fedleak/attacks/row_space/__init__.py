"""The row space of a shared gradient, and which inputs of a linear map span it.

The gradient of a linear map ``y = x W^T`` over N positions is ``D^T X``: every row of it is a
combination of the inputs. An adversary that knows the model can compute the input of every token,
and so ask which tokens were there.
"""
