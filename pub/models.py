import json
from pathlib import Path
root=Path('/tmp/w/planner/bench/papers/published')
(root/'models').mkdir(parents=True,exist_ok=True);(root/'clusters').mkdir(exist_ok=True)
def m(n,**k):
    (root/'models'/f'{n}.json').write_text(json.dumps({**k,'torch_dtype':'bfloat16'},indent=1)+'\n')
def llama(n,h,l,i,a,kv,v): m(n,architectures=['LlamaForCausalLM'],hidden_size=h,num_hidden_layers=l,intermediate_size=i,num_attention_heads=a,num_key_value_heads=kv,vocab_size=v,tie_word_embeddings=False)
llama('llama-3.1-70b',8192,80,28672,64,8,128256)
llama('llama-3.1-405b',16384,126,53248,128,8,128256)
llama('qwen2.5-72b',8192,80,29568,64,8,152064)
m('mixtral-8x7b',architectures=['MixtralForCausalLM'],hidden_size=4096,num_hidden_layers=32,intermediate_size=14336,num_local_experts=8,num_experts_per_tok=2,num_attention_heads=32,num_key_value_heads=8,vocab_size=32000,tie_word_embeddings=False)
m('qwen3-32b',architectures=['Qwen3ForCausalLM'],hidden_size=5120,num_hidden_layers=64,intermediate_size=25600,num_attention_heads=64,num_key_value_heads=8,head_dim=128,vocab_size=151936,tie_word_embeddings=False)
for n,h,l,mi,i,a in (('qwen3-235b',4096,94,1536,12288,64),('qwen3-30b',2048,48,768,6144,32)):
    m(n,architectures=['Qwen3MoeForCausalLM'],hidden_size=h,num_hidden_layers=l,num_experts=128,num_experts_per_tok=8,moe_intermediate_size=mi,intermediate_size=i,num_attention_heads=a,num_key_value_heads=4,head_dim=128,vocab_size=151936,decoder_sparse_step=1,mlp_only_layers=[],tie_word_embeddings=False)
def ds(n,arch,h,l,k,e,t,s,mi,i,a,v): m(n,architectures=[arch],hidden_size=h,num_hidden_layers=l,first_k_dense_replace=k,n_routed_experts=e,num_experts_per_tok=t,n_shared_experts=s,moe_intermediate_size=mi,intermediate_size=i,num_attention_heads=a,num_key_value_heads=a,q_lora_rank=1536,kv_lora_rank=512,qk_nope_head_dim=128,qk_rope_head_dim=64,v_head_dim=128,vocab_size=v)
ds('deepseek-r1','DeepseekV3ForCausalLM',7168,61,3,256,8,1,2048,18432,128,129280)
ds('kimi-k2','DeepseekV3ForCausalLM',7168,61,1,384,8,1,2048,18432,64,163840)
ds('deepseek-v2','DeepseekV2ForCausalLM',5120,60,1,160,6,2,1536,12288,128,102400)
m('minimax-m2',architectures=['MiniMaxM2ForCausalLM'],hidden_size=3072,num_hidden_layers=62,num_local_experts=256,num_experts_per_tok=8,intermediate_size=1536,num_attention_heads=48,num_key_value_heads=8,head_dim=128,vocab_size=200064)
m('gpt-oss-120b',architectures=['GptOssForCausalLM'],hidden_size=2880,num_hidden_layers=36,num_local_experts=128,num_experts_per_tok=4,intermediate_size=2880,num_attention_heads=64,num_key_value_heads=8,head_dim=64,vocab_size=201088,sliding_window=128,layer_types=['sliding_attention','full_attention']*18)
G={'910b':'[gpu]\nname = "Ascend 910B"\nmemory_gb = 64\nhbm_tb_per_second = 1.6\nbf16_tflops = 313\nsource = "Atlas 800T A2, Ascend 910B3, as published by resellers"\n',
'rtx':'[gpu]\nname = "RTX Pro 6000 Blackwell Server Edition"\nmemory_gb = 96\nhbm_tb_per_second = 1.597\nbf16_tflops = 503\nfp8_tflops = 1007\nfp4_tflops = 2015\nsource = "NVIDIA data sheet, without sparsity"\n',
'3090':'[gpu]\nname = "RTX 3090"\nmemory_gb = 24\nhbm_tb_per_second = 0.936\nbf16_tflops = 71\nsource = "NVIDIA GA102 whitepaper, without sparsity"\n'}
def c(gpu,nodes,per,inside,between=None,lat=3,name='nvlink'):
    head=G.get(gpu) or f'gpu = "{gpu.upper()}"\n'
    lev=lambda n,k,b,l:f'[[levels]]\nname = "{n}"\ncount = {k}\nbandwidth_gb_per_second = {b}\nlatency_us = {l}\n'
    body=lev(name,per,inside,lat)+(lev('network',nodes,between,12) if nodes>1 else '')
    (root/'clusters'/f'{gpu}-{nodes}x{per}.toml').write_text(head.replace('MI300X','MI300X')+body)
for gpu,b in (('h100',450),('h200',450),('a100',300),('b200',900),('b300',900)): c(gpu,1,8,b)
c('mi300x',1,8,448,name='xgmi')
c('h100',2,8,450,50); c('h200',2,8,450,50); c('h20',2,8,450,50); c('h100',12,8,450,50)
c('910b',4,8,60,25,name='hccs')
c('rtx',1,8,64,lat=5,name='pcie'); c('3090',1,2,8,lat=5,name='pcie')
