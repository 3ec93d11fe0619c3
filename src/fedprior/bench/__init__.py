"""How fast this machine is, on data made of random numbers: what `fedprior bench` prints, one measurement a module."""
