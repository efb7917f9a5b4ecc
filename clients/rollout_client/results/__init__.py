"""What a trainer reads from a `SampleResult`: token rows, final rewards, advantages. Needs only pydantic."""
