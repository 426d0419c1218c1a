"""Gradient compression: fewer bytes on the wire, and still convergence."""


# anchor 4.9
# end 4.9


# anchor 4.10
# end 4.10


# anchor 4.11
# end 4.11


# anchor 4.12
# end 4.12


# anchor 4.13
# end 4.13
