"""What a step costs, foretold: pure functions of a model, a link and a machine. docs/plan.md has the formulas."""
