"""What every chapter has and none teaches; each chapter holds a link to this folder."""
