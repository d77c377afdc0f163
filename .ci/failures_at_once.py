"""A pytest plugin that prints each failure immediately, so that a run that is cut short has shown it."""


def pytest_runtest_logreport(report):
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)
