"""The fixtures of the package's tests, which these tests use as well."""

pytest_plugins = ["conftest"]
