"""The rollouts of a response as tables, files, a notebook's HTML and the metrics of an experiment tracker."""
