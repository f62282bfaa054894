"""docs/models.md: its table, which scripts/model_table.py writes, is of the families and checkpoints that there are."""

from convert.families import FAMILIES, model_config
from tests import markdown, tiny, tiny_families


def test_the_table_of_models_is_of_these_families_and_checkpoints():
    page = (markdown.ROOT / "docs" / "models.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `") and "model_type" not in line]
    assert [row[0].strip(" `") for row in rows] == sorted(FAMILIES)
    for family, checkpoints, one, two, int8, experts in rows:
        if base := tiny_families.SAME_AS.get(family.strip(" `")):
            assert checkpoints.strip() == f"as `{base}`"
            continue
        configs = [c for c in tiny.EVERY_CASE.values() if c["model_type"] == family.strip(" `")]
        assert int(checkpoints) == len(configs)
        assert max(float(one), float(two)) <= 1e-4
        assert float(int8) < 0.5
        assert (experts.strip() == "yes") == any(model_config(config).num_experts for config in configs)
