"""The frontier as a picture: leakage against accuracy against bytes."""

from pathlib import Path

from frontier_view import Store, accuracies, gain, worst


def draw_picture(store: Store, model: str, picture: Path) -> None:
    """Draw the frontier of one model; names stand in a column at the side, so that none hides another."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trained = accuracies(store, model)
    points: list[tuple[float, float, float, str]] = []
    for defense, kinds in worst(store, model).items():
        result = trained[defense]["result"] if defense in trained else None
        if result and result["status"] == "finished":
            up = result["per_user_and_round"]["bytes_up"]
            points.append((max(map(gain, kinds.values())), 100 * result["accuracy"], up, defense))
    figure, axes = plt.subplots(figsize=(10, 6))
    points.sort()
    largest = max((point[2] for point in points), default=1.0)
    dots = [axes.scatter(accuracy, leak, s=20 + 300 * up / largest, alpha=0.6) for leak, accuracy, up, _ in points]
    low, high = axes.get_ylim()
    heights = _apart([(point[0] - low) / (high - low) for point in points])
    for height, dot, (leak, accuracy, up, defense) in zip(heights, dots, points, strict=True):
        axes.annotate(
            f"{defense}  ({up / 1000:.0f} kB)",
            (accuracy, leak),
            xytext=(1.03, height),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            color=dot.get_facecolor()[0][:3] * 0.8,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "grey", "relpos": (0, 0.5)},
            annotation_clip=False,
        )
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, high - 4), high)  # a tenth of a point must not look like a gulf
    axes.axhline(0, color="grey", lw=0.8, ls=":")
    axes.set_xlabel("test accuracy, %")
    axes.set_ylabel("SSIM of the worst attack beyond its own floor")
    axes.set_title(f"{model}: low and right is better; the size of a dot is the upload", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _apart(heights: list[float]) -> list[float]:
    """Return rising heights in 0..1, moved apart just so far that a line of text fits between two of them."""
    gap = min(0.05, 1 / max(len(heights), 1))
    above = 1 - gap * len(heights)
    for place in range(len(heights)):
        least = heights[place - 1] + gap if place else gap / 2
        above += gap
        heights[place] = min(max(heights[place], least), above - gap / 2)
    return heights
