"""Does an engine compute what it should on this machine? One short command, for machines where no tests are installed."""
