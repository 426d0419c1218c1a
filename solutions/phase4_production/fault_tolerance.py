"""Fault tolerance: notice that a rank is gone, and go on without it."""


# anchor 4.5
# end 4.5


# anchor 4.6
# end 4.6


# anchor 4.7
# end 4.7


# anchor 4.8
# end 4.8
