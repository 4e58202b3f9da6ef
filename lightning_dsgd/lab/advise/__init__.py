"""`lightning-dsgd advise`: every strategy on the cluster that was probed, with your own steps."""
