"""The paper's tables and figures, by the public methods: config -> network -> methods -> runs -> tables -> report."""
