"""What a simulation came to, over seeds, as numbers and pictures.

Reading order: result, metrics, plan_costs, sweep, decision_cost, pictures.
"""
