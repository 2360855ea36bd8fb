"""What several families' files share: readers of configurations and cutters of fused matrices.

Knows no family.
"""
