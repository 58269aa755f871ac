"""The row space of a shared gradient: which inputs a linear map was given, read off its gradient.

The gradient of a linear map ``y = x W^T`` over N positions is ``D^T X``: every row of it is a
combination of the inputs. Where the inputs are known given the token, whoever knows the model can
ask which tokens they were.
"""
