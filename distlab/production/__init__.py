"""What the production trainer is made of: solutions/phase4_production/imagenet_trainer.py."""
