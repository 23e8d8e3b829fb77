"""The files of the repository as tests read them: modules, documents, and pages of metrics."""
