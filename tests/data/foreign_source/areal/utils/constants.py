LOSSES = ["sigmoid", "ipo"]
