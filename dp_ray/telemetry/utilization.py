"""Which share of its devices' peak a run has used (MFU): `utilization`."""

from dp_ray.engine.clock import Flops

Peaks = dict[str, float]

# Dense peaks in TFLOP/s from the vendors' data sheets, by the beginning of the device's name; the first match counts.
# tf32 is what float32 matrices take if torch may use it for them.
PEAKS: tuple[tuple[str, Peaks], ...] = (
    ("NVIDIA B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    ("NVIDIA H200 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ("NVIDIA H200", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    ("NVIDIA H100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("NVIDIA H100 NVL", {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ("NVIDIA H100", {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    ("NVIDIA A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("NVIDIA A40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("NVIDIA A30", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    ("NVIDIA A10G", {}),  # another device than the A10, without a data sheet of its own
    ("NVIDIA A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    ("NVIDIA L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("NVIDIA L40", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    ("NVIDIA L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("Tesla T4", {"fp16": 65, "fp32": 8.1}),
    ("Tesla V100-SXM2", {"fp16": 125, "fp32": 15.7}),
    ("Tesla V100-PCIE", {"fp16": 112, "fp32": 14}),
)


def peak_of(device_name: str, arithmetic: str) -> float | None:
    """Return the dense peak of a device in FLOP/s; None if it is not known."""
    peaks = next((peaks for name, peaks in PEAKS if device_name.startswith(name)), {})
    return peaks[arithmetic] * 1e12 if arithmetic in peaks else None


def utilization(flops: Flops, rows_per_second: float, devices: int) -> float | None:
    """Return the rows' operations as a share of the devices' peak (MFU); None if the peak is not known."""
    peak = peak_of(flops.device_name, flops.arithmetic)
    return None if peak is None else round(flops.per_row * rows_per_second / (peak * devices), 4)
