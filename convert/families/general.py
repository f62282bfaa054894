"""Fields that any config may have, whatever its family: of files, of training, of generation."""

from __future__ import annotations

from convert.families.fields import Fields

_NO_EFFECT = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels activation_dropout
    architectures attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map
    cache_implementation classifier_dropout dropout dtype emb_pdrop embd_pdrop embed_dropout embedding_dropout
    finetuning_task gradient_checkpointing hidden_dropout hidden_dropout_prob id2label init_std initializer_range
    label2id layerdrop model_type name_or_path num_labels output_attentions output_hidden_states output_past
    pad_token_id predict_special_tokens problem_type resid_dropout resid_pdrop residual_dropout return_dict sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
    tf_legacy_loss tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict xla_device
"""
"""Fields that describe files, training or return types: never what the model computes at inference."""

_GENERATION = """
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature top_k top_p typical_p
"""
"""Defaults of sampling and of prompts that older transformers wrote into config.json; a request's own parameters
replace them."""


def skip_general(fields: Fields) -> None:
    """Ignore these, and expect the rest that all configs may have to say what is so of every decoder here."""
    fields.ignore(_NO_EFFECT.split())
    fields.ignore(_GENERATION.split())
    fields.expect("quantization_config", None)
    fields.expect("is_encoder_decoder", False)
    fields.expect("is_decoder", False, True)
    fields.expect("add_cross_attention", False)
    fields.expect("cross_attention_hidden_size", None)
    fields.expect("tie_encoder_decoder", False)
    fields.expect("chunk_size_feed_forward", 0)
    fields.expect("pruned_heads", {})
