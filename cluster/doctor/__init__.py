"""What keeps ranks from training together?"""
