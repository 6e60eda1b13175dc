"""What a policy sees and answers, and what becomes of a decision that fails.

Reading order: policy, views, plan, cycle_slots, policy_faults.
"""
