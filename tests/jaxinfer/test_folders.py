"""Where fetched and compiled files go."""

from jaxinfer.folders import cache_folder


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAXINFER_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "jaxinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "jaxinfer"
    monkeypatch.setenv("JAXINFER_CACHE", "~/models")
    assert cache_folder() == tmp_path / "models"
