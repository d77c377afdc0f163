"""A pytest plugin that prints each failure when it happens: a run that is cut short would tell none."""


def pytest_runtest_logreport(report):
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)
