"""The reproduction of the paper: its experiments, errata and data sets; see README.md in this folder."""
