"""The parts that Kafka's source, sink and formats share: registry, formats, checks of brokers."""
