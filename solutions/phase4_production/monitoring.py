"""Monitoring: where the time of a step goes, and who is late."""


# anchor 4.14
# end 4.14


# anchor 4.15
# end 4.15


# anchor 4.16
# end 4.16


# anchor 4.17
# end 4.17


# anchor 4.18
# end 4.18
