"""AlexNet, VGG-16 and a wide MLP on hosts joined by slow links: our plan against the usual ones."""
