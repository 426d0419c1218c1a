"""The parts of the production trainer, solutions/phase4_production/imagenet_trainer.py."""
