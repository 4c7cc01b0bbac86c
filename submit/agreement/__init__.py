"""What submit/agree.py sees of a training, and what it concludes."""
