"""What assets are given: storage, accelerator and models, configured from settings and replaceable in tests."""
