//! The one list of registered kernels: the contract program, the test of a model's launches and the generated page read it.

use crate::contract::Contract;

/// Every registered launch, in the order in which a forward uses them.
pub const CONTRACTS: &[Contract] = &[
    crate::embed::contract::EMBED,
    crate::rms_norm::contract::RMS_NORM,
    crate::quantise::contract::QUANTISE,
    crate::quantise::contract::IN_PLACE,
    crate::linear_fp8::contract::LINEAR_FP8,
    crate::linear_fp8::contract::GROUPED,
    crate::linear_bf16::contract::LINEAR_BF16,
    crate::linear_bf16::contract::LINEAR_F32,
    crate::moe_experts::contract::MOE_EXPERTS,
    crate::kv_store::contract::KV_STORE,
    crate::kv_store::contract::RING,
    crate::kv_compress::contract::RATIO1,
    crate::kv_compress::contract::RATIO2,
    crate::index_key::contract::INDEX_KEY,
    crate::index_query::contract::INDEX_QUERY,
    crate::index_score::contract::INDEX_SCORE,
    crate::index_score::contract::SELECT,
    crate::top_k::contract::TOP_K,
    crate::attention::contract::CAUSAL,
    crate::attention::contract::BLOCK,
    crate::moe_route::contract::MOE_ROUTE,
    crate::engram::contract::GATHER,
    crate::engram::contract::GATE,
    crate::hyper::contract::ENTER,
    crate::hyper::contract::EXPAND,
    crate::hyper::contract::COLLAPSE,
    crate::hyper::contract::TAP,
    crate::lm_head::contract::LM_HEAD,
    crate::sample::contract::SAMPLE,
    crate::draft_head::contract::DRAFT_HEAD,
    crate::draft_head::context::CONTEXT,
];

/// Records of chains of registered launches, which no launcher names.
pub const CHAINS: &[&str] = &["draft_head/context"];
