"""Draft length by goodput: acceptance statistics, cost profile, controller. numpy only; the simulator uses it too."""
