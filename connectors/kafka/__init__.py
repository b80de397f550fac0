"""What Kafka's source, sink and formats share: registry, value formats, checks of brokers."""
