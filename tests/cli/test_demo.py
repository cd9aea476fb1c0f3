import json


def test_the_demo_repairs_and_says_so(invoke, monkeypatch, tmp_path, written):
    monkeypatch.chdir(tmp_path)
    result = invoke("demo", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["met"] is True
    assert found["before"]["ks"] > 0.18
    assert found["after"]["ks"] < 0.13
    assert found["after"]["mse"] < 1.1 * found["before"]["mse"]
    assert written() == [found["report"]] == ["demo-report.html"]
