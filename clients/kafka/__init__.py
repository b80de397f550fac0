"""The connection to Kafka: clients, brokers, topics, schema registry and their settings."""
