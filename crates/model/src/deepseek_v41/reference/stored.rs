//! From the bytes of a checkpoint to float64, by the definitions of the formats.

use tf_kernels::linear_fp8::reference as linear_fp8;
use tf_kernels::moe_experts::reference as moe_experts;
use tf_kernels::reference_formats::{e4m3_decode, e8m0_decode};

use super::Tensor;

/// A tensor as a checkpoint stores it. `dtype` is spelled as in a safetensors header.
#[derive(Clone, Debug)]
pub struct Stored<'a> {
    pub dtype: &'a str,
    pub shape: Vec<usize>,
    pub bytes: &'a [u8],
}

/// The values of a tensor; `scale` is the tensor `<stem>.scale` that lies beside a quantised `<stem>.weight`.
///
/// # Errors
/// A dtype that is not one of the release's, or sizes that contradict each other.
pub fn dequantise(name: &str, stored: &Stored, scale: Option<&Stored>) -> Result<Tensor, String> {
    let elements: usize = stored.shape.iter().product();
    let width = match stored.dtype {
        "F32" => 4,
        "BF16" => 2,
        "F8_E4M3" | "I8" => 1,
        other => return Err(format!("its dtype is {other}; expected F32, BF16, F8_E4M3 or I8 (packed FP4)")),
    };
    if stored.bytes.len() != elements * width {
        return Err(format!("{} bytes do not fit {} of shape {:?}", stored.bytes.len(), stored.dtype, stored.shape));
    }
    let float32 = |bits: [u8; 4]| f64::from(f32::from_le_bytes(bits));
    if stored.dtype == "F32" {
        let values = stored.bytes.chunks_exact(4).map(|b| float32([b[0], b[1], b[2], b[3]])).collect();
        return Ok((stored.shape.clone(), values));
    }
    if stored.dtype == "BF16" {
        let values = stored.bytes.chunks_exact(2).map(|b| float32([0, 0, b[0], b[1]])).collect();
        return Ok((stored.shape.clone(), values));
    }
    let (&[rows, columns], Some(scale)) = (&stored.shape[..], scale) else {
        return Err(format!("{} needs two dimensions and a scale beside it", stored.dtype));
    };
    let is_table = name.contains("engram.embed");
    let expected = match stored.dtype {
        "I8" => vec![rows, columns / 16],
        _ if is_table => vec![rows, columns.div_ceil(32)],
        _ => vec![rows.div_ceil(32), columns.div_ceil(32)],
    };
    if scale.shape != expected || scale.bytes.len() != expected.iter().product::<usize>() {
        return Err(format!("its scale has shape {:?}, {:?} is needed", scale.shape, expected));
    }
    if stored.dtype == "I8" {
        return Ok((vec![rows, 2 * columns], moe_experts::dequantise(stored.bytes, scale.bytes, 2 * columns)));
    }
    if is_table {
        let value = |(i, &code): (usize, &u8)| {
            let block = i / columns * expected[1] + i % columns / 32;
            e4m3_decode(code) * e8m0_decode(scale.bytes[block])
        };
        return Ok((stored.shape.clone(), stored.bytes.iter().enumerate().map(value).collect()));
    }
    Ok((stored.shape.clone(), linear_fp8::dequantise(stored.bytes, scale.bytes, columns)))
}
